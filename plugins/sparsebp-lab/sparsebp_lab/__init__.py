"""Provide tools for testing methods: studies, a judge of proposals, a leaderboard, cost screening before training."""

from sparsebp_cli.cli.plugin import VerbEntry

LAB = "sparsebp_lab"
JUDGE = VerbEntry(
    f"{LAB}.verb.judge:judge",
    "More: results",
    {"judgement": (f"{LAB}.answer.judge_record:Judgement", 1)},
    writes=True,
    example="judge topk --against python-docs --budget 30m",
)
LEADERBOARD = VerbEntry(
    f"{LAB}.verb.leaderboard:leaderboard",
    "More: results",
    {
        "submission": (f"{LAB}.answer.leaderboard_record:SubmissionReport", 1),
        "rules": (f"{LAB}.answer.leaderboard_record:RuleList", 1),
    },
    writes=True,
    example="leaderboard check submission",
)
STUDY = VerbEntry(
    f"{LAB}.verb.study:study",
    "More: runs",
    {"study": (f"{LAB}.answer.study_record:StudyState", 1), "rebuilt": (f"{LAB}.answer.study_record:RebuiltStudy", 1)},
    writes=True,
    example="study study.yaml --dry-run",
)
WORTH = VerbEntry(
    f"{LAB}.verb.worth:worth",
    "More: write and check recipes",
    {"worth": (f"{LAB}.answer.worth_record:WorthAnswer", 2)},
    example="worth topk-rows",
)

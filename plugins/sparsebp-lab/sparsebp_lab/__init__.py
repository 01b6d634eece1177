"""Provide tools for testing methods: studies, a judge of proposals, cost screening before training."""

from sparsebp_cli.cli.plugin import VerbEntry

LAB = "sparsebp_lab"
JUDGE = VerbEntry(
    f"{LAB}.verb.judge:judge",
    "More: results",
    {"judgement": (f"{LAB}.answer.judge_record:Judgement", 1)},
    writes=True,
    example="judge quickstart --against quickstart-dense --budget 30m",
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

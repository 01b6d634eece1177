"""The leaderboard's rules as data, and whether a study keeps them: one of ours, or one that others submit."""

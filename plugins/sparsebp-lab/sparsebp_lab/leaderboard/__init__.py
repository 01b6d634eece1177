"""Hold the leaderboard's rules as data, and check whether a built-in or submitted study keeps them."""

"""Extensions that execute kinds of policies that do not decide at sites: a package or module for each kind."""

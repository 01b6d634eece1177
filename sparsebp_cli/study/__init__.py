"""Studies: arms over one base recipe, each tuned, at the same budget, with controls; planned, run and selected."""

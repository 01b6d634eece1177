"""Write recipes for other schedulers: a batch script, a manifest or a task that contains the plan."""

"""The process on the machine: builds model and data from a plan, trains, measures, writes the journal."""

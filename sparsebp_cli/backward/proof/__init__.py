"""What a policy did, measured against what it claims."""

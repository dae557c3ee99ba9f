"""What a user would measure: ours and its peers, side by side in one run."""

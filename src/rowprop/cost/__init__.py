"""What a step costs: counted, not guessed."""

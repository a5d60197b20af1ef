"""Learning from live use: episodes with consent, rewards of users, shipping."""

"""What the server speaks: the OpenAI API, and tokens with routes."""

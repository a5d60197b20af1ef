"""What runs measure, write and show; host only."""

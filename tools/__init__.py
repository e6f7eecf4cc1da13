"""Developer tools and example networks; never installed."""

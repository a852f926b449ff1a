"""Scripts that can be stopped at any iteration and go on later."""

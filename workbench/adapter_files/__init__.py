"""Opens adapter files of all kinds: to start from, show, convert, merge, compare or draw them."""

"""Options and errors of `collab_compress`, which import nothing large, so that commands start at once."""

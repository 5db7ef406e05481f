"""`collab-sweep`: many experiments from one description."""

from .run import sweep_main as main

__all__ = ["main"]

if __name__ == "__main__":
    main()

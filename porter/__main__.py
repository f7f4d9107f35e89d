"""`python -m porter` is zm-port."""

from porter.cli import main

if __name__ == "__main__":
    main()

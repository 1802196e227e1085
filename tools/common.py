"""Imported instead of the real common.py by a tool that is run by its path."""
import sys
from pathlib import Path

sys.exit(f"error: run this in the root of the repository: python -m tools.{Path(sys.argv[0]).stem}")

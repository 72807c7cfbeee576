"""What ``python -m ckptkern`` runs, a module or package for each command."""

"""`jetspecpp doctor`: whether models, files and machine go together, and why speculation gains what it gains here."""

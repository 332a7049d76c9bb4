"""The five answers side by side, and together: a study of our own, run as a paper is."""

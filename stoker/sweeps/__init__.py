"""Many runs: their table and page, launchers and searches."""

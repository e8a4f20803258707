"""Each role's hardest path alone, in about a minute, before a run is started."""

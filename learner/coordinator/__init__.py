"""The coordinator process: ledger, journal, leases, staleness, batch plan. Imports neither torch nor vLLM."""

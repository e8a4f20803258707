"""Alert rules, scrape configuration and Grafana dashboard of a run, made from the table of metrics."""

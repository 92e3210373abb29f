"""Between the files of a run and what is drawn of it: columns, ranks, the plan, events, alerts, whether it lives."""

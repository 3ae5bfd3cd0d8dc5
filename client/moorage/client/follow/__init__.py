"""Following jobs: one merge of what is said of a job, one place that decides where it comes from, and views of both."""

"""What the scheduler answers to questions: the `data` of an `Answer`, a struct for each verb.

The scheduler fills them, and every client reads their fields. A field that an older scheduler does not send has its
default; a field of a newer one is ignored. Times are ledger milliseconds, unless the name says otherwise.
"""

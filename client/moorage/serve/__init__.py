"""What the function of a service imports, in its own process. It needs nothing of the client.

from moorage.serve import Answer, CallError, endpoint
"""

from __future__ import annotations

from moorage.schemas.served import Answer, CallError, endpoint

__all__ = ["Answer", "CallError", "endpoint"]

"""What is answered to a request that is not taken at all."""

from attrs import define


@define(auto_exc=True)
class Refusal(Exception):
    """An HTTP status, and a sentence. after: seconds in which the client may come again.

    400 to 422 end the call of a client at once; 429 and 503 make it come again, with the same request.
    """

    status: int
    message: str
    after: float | None = None

    def __str__(self) -> str:
        return self.message

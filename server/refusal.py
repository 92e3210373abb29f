"""What is answered to a request that is not taken at all."""

from attrs import define


@define(auto_exc=True)
class Refusal(Exception):
    """A refusal: an HTTP status and a sentence. after: seconds until a retry. Statuses 400 to 422 end a client's call;
    429 and 503 make the client retry the same request."""

    status: int
    message: str
    after: float | None = None

    def __str__(self) -> str:
        return self.message

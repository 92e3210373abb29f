"""Train on an xtrain server from any Python program: `Server`, its models and samplers. It loads no torch."""

from .http import ServerRefused as ServerRefused
from .http import ServerUnreachable as ServerUnreachable
from .pending import Pending as Pending
from .pending import RequestFailed as RequestFailed
from .remote import CallUnanswered as CallUnanswered
from .remote import RemoteModel as RemoteModel
from .remote import RemoteSampler as RemoteSampler
from .remote import Server as Server
from .values import IGNORED as IGNORED
from .values import PassOutcome as PassOutcome
from .values import TrainingRow as TrainingRow
from .values import WrittenText as WrittenText

"""Train on an xtrain server from any Python program: `Server`, its models and samplers. It loads no torch."""

from xtrain.client.http import Pending as Pending
from xtrain.client.http import RequestFailed as RequestFailed
from xtrain.client.http import ServerRefused as ServerRefused
from xtrain.client.http import ServerUnreachable as ServerUnreachable
from xtrain.client.remote import IGNORED as IGNORED
from xtrain.client.remote import CallUnanswered as CallUnanswered
from xtrain.client.remote import PassOutcome as PassOutcome
from xtrain.client.remote import RemoteModel as RemoteModel
from xtrain.client.remote import RemoteSampler as RemoteSampler
from xtrain.client.remote import Server as Server
from xtrain.client.remote import TrainingRow as TrainingRow
from xtrain.client.remote import WrittenText as WrittenText

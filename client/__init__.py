"""Train on an xtrain server from any Python program: `Server`, its models and samplers. It loads no torch."""

from xtrain.client.http import ServerRefused as ServerRefused
from xtrain.client.http import ServerUnreachable as ServerUnreachable
from xtrain.client.pending import Pending as Pending
from xtrain.client.pending import RequestFailed as RequestFailed
from xtrain.client.remote import CallUnanswered as CallUnanswered
from xtrain.client.remote import RemoteModel as RemoteModel
from xtrain.client.remote import RemoteSampler as RemoteSampler
from xtrain.client.remote import Server as Server
from xtrain.client.values import IGNORED as IGNORED
from xtrain.client.values import PassOutcome as PassOutcome
from xtrain.client.values import TrainingRow as TrainingRow
from xtrain.client.values import WrittenText as WrittenText

"""The translator of Section 5.5: LSTMs with attention, as in the tutorial cited by the paper."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field, PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence


class Lengths(NamedTuple):
    """Words per sentence, at least one; on the device, except `sorted`."""

    each: Tensor
    order: Tensor  # the sentences by decreasing length
    places: Tensor  # of the sentences in this order
    sorted: Tensor  # on the CPU, where torch packs sequences

    @classmethod
    def of(cls, lengths: Tensor) -> Lengths:
        """Return all forms of `lengths`, on the CPU."""
        decreasing, order = lengths.sort(descending=True)
        return cls(lengths, order, order.argsort(), decreasing)


class Memory(NamedTuple):
    """What the decoder attends to, computed once per sentence."""

    keys: Tensor  # sentences × units × length
    values: Tensor  # sentences × length × units: inputs of the attention layer
    mask: Tensor  # sentences × 1 × length: −∞ after the end, else 0


class DecoderState(NamedTuple):
    """The decoder after a word, sentences × beams × units; beams share their memory."""

    bottom: tuple[Tensor, Tensor]  # hidden and cell
    top: tuple[Tensor, Tensor]
    attention: Tensor  # an input of the next step
    memory: Memory

    def select(self, sentences: Tensor, beams: Tensor) -> DecoderState:
        """Return these sentences, with these beams of each (sentences × beams)."""
        rows = sentences[:, None]
        bottom, top = ((h[rows, beams], c[rows, beams]) for h, c in (self.bottom, self.top))
        memory = Memory(*(x[sentences] for x in self.memory))
        return DecoderState(bottom, top, self.attention[rows, beams], memory)


class Cell(nn.Module):
    """An LSTM whose gates share one matrix and one bias, as in TF: two blocks for AdaShift's φ."""

    def __init__(self, inputs: int, units: int) -> None:
        super().__init__()
        self.inputs = inputs
        self.kernel = nn.Parameter(torch.empty(4 * units, inputs + units))
        self.bias = nn.Parameter(torch.zeros(4 * units))
        with torch.no_grad():
            self.bias[units : 2 * units] = 1  # TF adds 1 to the forget gate in every step

    def parts(self) -> list[Tensor]:
        """Return the parameters in the form of torch.lstm, which adds two biases."""
        before, behind = self.kernel[:, : self.inputs], self.kernel[:, self.inputs :]
        return [before, behind, self.bias, torch.zeros_like(self.bias)]


def lstm_gates(gates: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
    """Return hidden and cell state from the inputs of the gates."""
    i, f, g, o = gates.chunk(4, -1)
    cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
    return o.sigmoid() * cell.tanh(), cell


class Translator(nn.Module):
    """A bidirectional encoder, a decoder of two layers, scaled Luong attention with input feeding.

    The final states of the two directions initialize the two decoder layers. Dropout is applied to
    the inputs of an LSTM. With `tanh`, attention is tanh(W[h; c]), as in the tutorial's equations;
    without, W[h; c], as in the TF code that it calls.
    """

    def __init__(
        self,
        source_words: PositiveInt,
        target_words: PositiveInt,
        units: PositiveInt,
        dropout: Annotated[float, Field(ge=0, lt=1)],
        init: PositiveFloat,
        tanh: bool,
    ) -> None:
        super().__init__()
        self.units, self.tanh = units, tanh
        self.dropout = nn.Dropout(dropout)
        self.source = nn.Embedding(source_words, units)
        self.target = nn.Embedding(target_words, units)
        self.forwards, self.backwards = Cell(units, units), Cell(units, units)
        self.bottom, self.top = Cell(2 * units, units), Cell(units, units)
        self.keys = nn.Linear(2 * units, units, bias=False)
        self.scale = nn.Parameter(torch.ones(()))
        self.attention = nn.Linear(3 * units, units, bias=False)
        self.output = nn.Linear(units, target_words, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.uniform_(parameter, -init, init)

    def forward(self, source: Tensor, lengths: Lengths, words: Tensor) -> Tensor:
        """Return the attention vectors (time × sentences × units) that predict the next words.

        `words` are all words of the translations (sentences × time, teacher forcing).
        """
        state = self.encode(source, lengths)
        recurrent, vectors = self.recurrent(), list[Tensor]()
        for inputs in self.enter(words.t()).unsqueeze(2):
            state = self.step(inputs, state, recurrent)
            vectors.append(state.attention)
        return torch.stack(vectors).squeeze(2)

    def advance(self, words: Tensor, state: DecoderState) -> tuple[Tensor, DecoderState]:
        """Return log-probabilities of the next words and the state, after one word of each beam."""
        state = self.step(self.enter(words), state, self.recurrent())
        return self.output(state.attention).log_softmax(-1), state

    def encode(self, source: Tensor, lengths: Lengths) -> DecoderState:
        """Encode padded sentences (sentences × length)."""
        words = self.dropout(self.source(source.t()))
        # Sorted here: torch would copy the order to the device and back.
        packed = pack_padded_sequence(words.index_select(1, lengths.order), lengths.sorted)
        count = len(source)
        zeros = words.new_zeros(2, count, self.units)
        outputs, hidden, cell = torch.lstm(
            packed.data,
            packed.batch_sizes,
            (zeros, zeros),
            [*self.forwards.parts(), *self.backwards.parts()],
            True,  # biases
            1,  # layer
            0.0,  # dropout between layers
            self.training,
            True,  # bidirectional
        )
        read, _ = pad_packed_sequence(PackedSequence(outputs, *packed[1:]), batch_first=True)
        read = read.index_select(0, lengths.places)
        hidden, cell = (x[:, lengths.places, None] for x in (hidden, cell))
        return DecoderState(
            bottom=(hidden[0], cell[0]),
            top=(hidden[1], cell[1]),
            attention=words.new_zeros(count, 1, self.units),
            memory=self.remember(read, lengths.each),
        )

    def remember(self, read: Tensor, lengths: Tensor) -> Memory:
        places = torch.arange(read.shape[1], device=read.device)
        mask = torch.zeros(len(lengths), 1, len(places), device=read.device)
        mask.masked_fill_(places >= lengths[:, None, None], -torch.inf)
        # W[h; c] is W_h h + W_c c, and c is a mean: apply W_c before the mean, once per sentence.
        values = F.linear(read, self.attention.weight[:, self.units :])
        return Memory((self.scale * self.keys(read)).transpose(1, 2), values, mask)

    def enter(self, words: Tensor) -> Tensor:
        """Return what words contribute to the gates of the lower layer, for all words at once."""
        cell = self.bottom
        return F.linear(self.dropout(self.target(words)), cell.kernel[:, : self.units], cell.bias)

    def recurrent(self) -> tuple[Tensor, Tensor]:
        """Return slices of the lower layer's and attention's matrices, once for all steps."""
        return self.bottom.kernel[:, self.units :], self.attention.weight[:, : self.units]

    def step(
        self, inputs: Tensor, state: DecoderState, recurrent: tuple[Tensor, Tensor]
    ) -> DecoderState:
        bottom, attention = recurrent
        (hidden, cell), (upper, upper_cell) = state.bottom, state.top
        fed = torch.cat([self.dropout(state.attention), hidden], -1)
        hidden, cell = lstm_gates(inputs + F.linear(fed, bottom), cell)
        fed = torch.cat([self.dropout(hidden), upper], -1)
        upper, upper_cell = lstm_gates(F.linear(fed, self.top.kernel, self.top.bias), upper_cell)
        keys, values, mask = state.memory
        weights = torch.baddbmm(mask, upper, keys).softmax(-1)
        vector = torch.baddbmm(F.linear(upper, attention), weights, values)
        vector = vector.tanh() if self.tanh else vector
        return DecoderState((hidden, cell), (upper, upper_cell), vector, state.memory)

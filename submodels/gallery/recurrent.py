"""Recurrent models."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from submodels.gallery.case import Case, first, numbers, words


class Language(nn.Module):
    """A language model that returns its hidden state, as PyTorch's word_language_model does."""

    def __init__(self, kind=nn.LSTM, **options):
        super().__init__()
        self.drop, self.encoder = nn.Dropout(0.2), nn.Embedding(50, 24)
        self.rnn = kind(24, 32, **options)
        self.decoder = nn.Linear(32, 50)

    def forward(self, x, hidden=None):
        out, hidden = self.rnn(self.drop(self.encoder(x)), hidden)
        return F.log_softmax(self.decoder(self.drop(out)), dim=-1), hidden


class Shakespeare(nn.Module):
    """LEAF's next-character model: two layers, the last step."""

    def __init__(self):
        super().__init__()
        self.embed, self.lstm, self.out = nn.Embedding(80, 8), nn.LSTM(8, 64, 2, batch_first=True), nn.Linear(64, 80)

    def forward(self, x):
        self.lstm.flatten_parameters()
        return self.out(self.lstm(self.embed(x))[0][:, -1])


class Tagger(nn.Module):
    """A bidirectional tagger."""

    def __init__(self, kind=nn.LSTM):
        super().__init__()
        self.embed, self.out = nn.Embedding(50, 24), nn.Linear(64, 9)
        self.rnn = kind(24, 32, num_layers=2, bidirectional=True, batch_first=True, dropout=0.1)

    def forward(self, x):
        return self.out(self.rnn(self.embed(x))[0])


class LastState(nn.Module):
    """A classifier on the last hidden state of both directions."""

    def __init__(self):
        super().__init__()
        self.rnn, self.fc = nn.GRU(12, 32, bidirectional=True, batch_first=True), nn.Linear(64, 5)

    def forward(self, x):
        _, hidden = self.rnn(x)
        return self.fc(torch.cat([hidden[-2], hidden[-1]], dim=1))


class Packed(nn.Module):
    """Sequences of several lengths, packed."""

    def __init__(self):
        super().__init__()
        self.embed, self.rnn, self.fc = nn.Embedding(50, 16), nn.LSTM(16, 32, batch_first=True), nn.Linear(32, 5)

    def forward(self, x, lengths):
        packed = pack_padded_sequence(self.embed(x), lengths.cpu(), batch_first=True, enforce_sorted=False)
        out, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        return self.fc(out.mean(1))


class CellLoop(nn.Module):
    """A loop over an LSTM cell, with states made by hand."""

    def __init__(self):
        super().__init__()
        self.hidden_size, self.cell, self.out = 32, nn.LSTMCell(12, 32), nn.Linear(32, 3)

    def forward(self, x):
        h = c = torch.zeros(x.size(0), self.hidden_size, device=x.device)
        for t in range(x.size(1)):
            h, c = self.cell(x[:, t], (h, c))
        return self.out(h)


class HandWritten(nn.Module):
    """An LSTM from a blog post: one matrix for all gates, cut by multiples of the hidden size."""

    def __init__(self, size=24):
        super().__init__()
        self.hidden_size = size
        self.w, self.u = nn.Parameter(torch.randn(12, size * 4)), nn.Parameter(torch.randn(size, size * 4))
        self.bias, self.out = nn.Parameter(torch.zeros(size * 4)), nn.Linear(size, 5)

    def forward(self, x):
        n = self.hidden_size
        h = c = torch.zeros(x.size(0), n)
        for t in range(x.size(1)):
            gates = x[:, t] @ self.w + h @ self.u + self.bias
            i, f = torch.sigmoid(gates[:, :n]), torch.sigmoid(gates[:, n : n * 2])
            g, o = torch.tanh(gates[:, n * 2 : n * 3]), torch.sigmoid(gates[:, n * 3 :])
            c = f * c + i * g
            h = o * torch.tanh(c)
        return self.out(h)


class MinimalGated(nn.Module):
    """A GRU of linear layers whose gates come from chunk."""

    def __init__(self):
        super().__init__()
        self.x2h, self.h2h, self.out = nn.Linear(12, 96), nn.Linear(32, 96), nn.Linear(32, 4)

    def forward(self, x):
        h = x.new_zeros(x.shape[0], self.h2h.in_features)
        for step in x.unbind(1):
            (xr, xz, xn), (hr, hz, hn) = self.x2h(step).chunk(3, 1), self.h2h(h).chunk(3, 1)
            z = torch.sigmoid(xz + hz)
            h = (1 - z) * torch.tanh(xn + torch.sigmoid(xr + hr) * hn) + z * h
        return self.out(h)


class Seq2Seq(nn.Module):
    """An encoder, and a decoder that attends to it (Bahdanau)."""

    def __init__(self):
        super().__init__()
        self.source, self.target = nn.Embedding(50, 16), nn.Embedding(50, 16)
        self.encoder, self.decoder = nn.GRU(16, 32, batch_first=True), nn.GRUCell(16 + 32, 32)
        self.wa, self.ua, self.va, self.out = nn.Linear(32, 24), nn.Linear(32, 24), nn.Linear(24, 1), nn.Linear(32, 50)

    def forward(self, x, y):
        keys, hidden = self.encoder(self.source(x))
        h, outputs = hidden[0], []
        for t in range(y.shape[1]):
            score = self.va(torch.tanh(self.wa(h).unsqueeze(1) + self.ua(keys))).squeeze(2)
            context = torch.bmm(score.softmax(1).unsqueeze(1), keys).squeeze(1)
            h = self.decoder(torch.cat([self.target(y[:, t]), context], 1), h)
            outputs.append(self.out(h))
        return torch.stack(outputs, 1)


class ConvLSTM(nn.Module):
    """A convolutional LSTM cell over frames."""

    def __init__(self):
        super().__init__()
        self.hidden_dim, self.conv, self.out = 16, nn.Conv2d(3 + 16, 4 * 16, 3, padding=1), nn.Conv2d(16, 1, 1)

    def forward(self, x):
        b, t, _, height, width = x.shape
        h, c = (torch.zeros(b, self.hidden_dim, height, width) for _ in range(2))
        for i in range(t):
            joined = self.conv(torch.cat([x[:, i], h], dim=1))
            i_, f, o, g = torch.split(joined, self.hidden_dim, dim=1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i_) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
        return self.out(h)


class DeepConvLSTM(nn.Module):
    """Sensor windows: convolutions, then an LSTM."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv1d(6, 32, 5), nn.BatchNorm1d(32), nn.ReLU(), nn.Conv1d(32, 32, 5), nn.ReLU())
        self.lstm, self.fc = nn.LSTM(32, 48), nn.Linear(48, 12)

    def forward(self, x):
        return self.fc(self.lstm(self.conv(x).permute(2, 0, 1))[0][-1])


class StackedProjections(nn.Module):
    """LSTMs with projections, norms and a shortcut between them."""

    def __init__(self):
        super().__init__()
        self.e = nn.Embedding(50, 24)
        self.lstm = nn.ModuleList([nn.LSTM(24 if i == 0 else 16, 48, proj_size=16, batch_first=True) for i in range(2)])
        self.n = nn.ModuleList([nn.LayerNorm(16) for _ in range(2)])
        self.o = nn.Linear(16, 50)

    def forward(self, x):
        x = self.e(x)
        for i, (l, n) in enumerate(zip(self.lstm, self.n)):
            y, _ = l(x)
            y = n(y)
            x = y if i == 0 else x + y
        return self.o(x)


class AttentionPooling(nn.Module):
    """A bidirectional GRU whose steps are weighed by a softmax."""

    def __init__(self):
        super().__init__()
        self.g = nn.GRU(9, 32, num_layers=2, batch_first=True, bidirectional=True, dropout=0.1)
        self.a = nn.Linear(64, 1)
        self.o = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 6))

    def forward(self, x):
        h, _ = self.g(x)
        w = torch.softmax(self.a(h), 1)
        return self.o((w * h).sum(1))


class NormedLSTM(nn.Module):
    """An LSTM of plain parameters with a norm in every gate."""

    def __init__(self, i=8, h=24):
        super().__init__()
        self.h = h
        self.wi = nn.Parameter(torch.randn(4 * h, i))
        self.wh = nn.Parameter(torch.randn(4 * h, h))
        self.ni = nn.LayerNorm(4 * h)
        self.nh = nn.LayerNorm(4 * h)
        self.nc = nn.LayerNorm(h)
        self.o = nn.Linear(h, 3)

    def forward(self, x):
        h = x.new_zeros(x.size(0), self.h)
        c = x.new_zeros(x.size(0), self.h)
        for t in range(x.size(1)):
            g = self.ni(x[:, t] @ self.wi.t()) + self.nh(h @ self.wh.t())
            i, f, z, o = g.chunk(4, 1)
            c = self.nc(f.sigmoid() * c + i.sigmoid() * z.tanh())
            h = o.sigmoid() * c.tanh()
        return self.o(h)


class SimpleRecurrent(nn.Module):
    """A simple recurrent unit: gates from one matrix, a highway around it."""

    def __init__(self):
        super().__init__()
        self.i = nn.Linear(10, 32)
        self.w = nn.Linear(32, 96)
        self.o = nn.Linear(32, 4)

    def forward(self, x):
        x = self.i(x)
        u = self.w(x).view(x.size(0), x.size(1), 3, -1)
        z, f, r = u.unbind(2)
        f, r = f.sigmoid(), r.sigmoid()
        c = torch.zeros_like(z[:, 0])
        hs = []
        for t in range(x.size(1)):
            c = f[:, t] * c + (1 - f[:, t]) * z[:, t]
            hs.append(r[:, t] * c.tanh() + (1 - r[:, t]) * x[:, t])
        return self.o(torch.stack(hs, 1).mean(1))


class CharacterLanguage(nn.Module):
    """Words from their characters: convolutions, a highway, an LSTM."""

    def __init__(self):
        super().__init__()
        self.e = nn.Embedding(70, 15)
        self.c = nn.ModuleList([nn.Conv1d(15, f, k) for k, f in ((2, 12), (3, 20))])
        self.t = nn.Linear(32, 32)
        self.h = nn.Linear(32, 32)
        self.lstm = nn.LSTM(32, 40, batch_first=True)
        self.o = nn.Linear(40, 30)

    def forward(self, x):
        b, t, c = x.shape
        e = self.e(x.view(b * t, c)).transpose(1, 2)
        y = torch.cat([F.relu(k(e)).max(-1)[0] for k in self.c], 1)
        g = torch.sigmoid(self.t(y))
        y = g * F.relu(self.h(y)) + (1 - g) * y
        return self.o(self.lstm(y.view(b, t, -1))[0])


class ActorCritic(nn.Module):
    """A policy and a value on an LSTM cell whose state goes in and out."""

    def __init__(self):
        super().__init__()
        self.f = nn.Linear(6, 32)
        self.lstm = nn.LSTMCell(32, 24)
        self.p = nn.Linear(24, 4)
        self.v = nn.Linear(24, 1)

    def forward(self, x, hc):
        h, c = self.lstm(F.relu(self.f(x)), hc)
        return F.softmax(self.p(h), -1), self.v(h), (h, c)


def _state(layers=1):
    def make():
        return torch.randint(0, 50, (7, 4)), (torch.randn(layers, 4, 32), torch.randn(layers, 4, 32))

    return make


MODELS = {
    "lstm-shakespeare": Case(Shakespeare, words(4, 20, vocabulary=80)),
    "lstm-language-returns-state": Case(Language, words(7, 4), {"outputs": first}),
    "lstm-language-state-in-and-out": Case(Language, _state(), {"outputs": first}),
    "lstm-language-two-layers": Case(lambda: Language(num_layers=2, dropout=0.1), _state(2), {"outputs": first}),
    "gru-language": Case(lambda: Language(nn.GRU, batch_first=True), words(4, 7), {"outputs": first}),
    "lstm-projected": Case(
        lambda: nn.Sequential(nn.Linear(5, 16), _Only(nn.LSTM(16, 32, proj_size=12)), nn.Linear(12, 3)),
        numbers(6, 2, 5),
    ),
    "lstm-tagger-bidirectional": Case(Tagger, words(4, 7)),
    "gru-tagger-bidirectional": Case(lambda: Tagger(nn.GRU), words(4, 7)),
    "rnn-tagger": Case(lambda: Tagger(nn.RNN), words(4, 7)),
    "gru-last-state": Case(LastState, numbers(4, 7, 12)),
    "lstm-packed": Case(Packed, lambda: (torch.randint(0, 50, (3, 6)), torch.tensor([6, 3, 5]))),
    "lstm-cell-loop": Case(CellLoop, numbers(4, 5, 12)),
    "lstm-by-hand": Case(HandWritten, numbers(4, 5, 12)),
    "gru-by-hand": Case(MinimalGated, numbers(4, 5, 12)),
    "seq2seq-attention": Case(Seq2Seq, lambda: (torch.randint(0, 50, (3, 6)), torch.randint(0, 50, (3, 4)))),
    "conv-lstm": Case(ConvLSTM, numbers(2, 3, 3, 8, 8)),
    "deep-conv-lstm": Case(DeepConvLSTM, numbers(4, 6, 24)),
    "lstm-stacked-projections": Case(StackedProjections, words(3, 7)),
    "gru-attention-pooling": Case(AttentionPooling, numbers(3, 7, 9)),
    "lstm-normed": Case(NormedLSTM, numbers(3, 4, 8)),
    "simple-recurrent": Case(SimpleRecurrent, numbers(3, 5, 10)),
    "characters-of-words": Case(CharacterLanguage, lambda: torch.randint(0, 70, (2, 5, 6))),
    "actor-critic": Case(
        ActorCritic,
        lambda: (torch.randn(4, 6), (torch.randn(4, 24), torch.randn(4, 24))),
        {"outputs": lambda out: out[:2]},
    ),
}


class _Only(nn.Module):
    """The output of a recurrent layer, without its state."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)[0]

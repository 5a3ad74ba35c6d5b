"""Gradients of four batches make one step."""

import torch
from torch import nn

torch.manual_seed(0)
table, network, head = nn.Embedding(100, 16), nn.LSTM(16, 16, 2, batch_first=True, dropout=0.1), nn.Linear(16, 100)
parameters = [*table.parameters(), *network.parameters(), *head.parameters()]
optimizer = torch.optim.SGD(parameters, 0.1, momentum=0.9)
for number in range(4 * 40):
    words = torch.randint(100, (4, 9))
    scores = head(network(table(words[:, :-1]))[0])
    loss = nn.functional.cross_entropy(scores.flatten(0, 1), words[:, 1:].flatten()) / 4
    loss.backward()
    if number % 4 == 3:
        nn.utils.clip_grad_norm_(parameters, 0.25)
        optimizer.step()
        optimizer.zero_grad()
print(loss.item())
torch.save(parameters, "weights.pt")

"""Two networks, two optimizers, one step."""

import torch
from torch import nn

torch.manual_seed(0)
maker = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16))
judge = nn.Sequential(nn.Linear(16, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
of_maker, of_judge = torch.optim.Adam(maker.parameters()), torch.optim.Adam(judge.parameters())
loss_of = nn.BCEWithLogitsLoss()
for number in range(40):
    made = maker(torch.randn(32, 8))
    of_judge.zero_grad()
    wrong = loss_of(judge(torch.randn(32, 16)), torch.ones(32, 1)) + loss_of(judge(made.detach()), torch.zeros(32, 1))
    wrong.backward()
    of_judge.step()
    of_maker.zero_grad()
    loss_of(judge(made), torch.ones(32, 1)).backward()
    of_maker.step()
    if number % 10 == 0:
        print(number, wrong.item())
torch.save([maker.state_dict(), judge.state_dict()], "weights.pt")

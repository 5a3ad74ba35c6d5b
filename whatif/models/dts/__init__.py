"""DTS: training one network on several processors by pipeline, federated and split learning (docs/dts.md).

Source: Robinson, Esposito, Zuluaga, "DTS: A Simulator to Estimate the Training Time of Distributed Deep Neural
Networks", MASCOTS 2022.
"""

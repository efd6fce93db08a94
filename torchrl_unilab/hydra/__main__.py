"""``python -m torchrl_unilab.hydra --config-name appo``: train what a configuration composes."""

from torchrl_unilab.fork_server import start_fork_server

if __name__ == "__main__":
    start_fork_server()  # before TorchRL is imported, and a plugin of the user's

    from torchrl_unilab.hydra.train import main

    main()

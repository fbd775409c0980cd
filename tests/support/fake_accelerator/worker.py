"""The process in which tests run on the fake accelerator, one after another."""

from worker_process import serve

from fake_accelerator.accelerator import load

if __name__ == "__main__":
    serve(load)

"""The process in which tests run on the simulated driver, one after another."""

from worker_process import serve

from simulated_driver.driver import Driver
from simulated_driver.program import use_copy_engines

if __name__ == "__main__":
    use_copy_engines()
    serve(Driver)

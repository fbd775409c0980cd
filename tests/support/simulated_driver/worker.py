"""The process in which tests run on the simulated driver, one after another."""

from worker_process import serve

from simulated_driver.driver import Driver

if __name__ == "__main__":
    serve(Driver)

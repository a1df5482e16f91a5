from torch import _C


class ContextProp:
    def __init__(self, getter, setter):
        self.getter = getter
        self.setter = setter

    def __get__(self, owner, kind):
        return self.getter()

    def __set__(self, owner, value):
        self.setter(value)


class CudnnModule:
    benchmark = ContextProp(_C._get_cudnn_benchmark, _C._set_cudnn_benchmark)


cudnn = CudnnModule()

# make train_gpt2cu   the trainer            make test      all tests that this machine can run
# make benches        dev/bench_*            make profile   a build with line info, three steps to look at
# make archs          every kernel for every architecture    make help
#
# ARCH="80 90a"   architectures to build for; default: this machine's GPUs, else 80 with PTX for later ones
# NVCC=…  CXX=…   compilers                  MARCH=…        host instruction set, default native
NVCC  ?= nvcc
CXX   ?= g++
MARCH ?= native

# A query that fails, or answers with anything but "9.0" and the like, counts as no GPU. 9.0 becomes 90a: wgmma needs the a.
PROBE := $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | grep -E '^[0-9]+\.[0-9]$$' | tr -d . | sort -u)
ARCH  ?= $(patsubst 90,90a,$(PROBE))
ifeq ($(strip $(ARCH)),)
GENCODE := -gencode arch=compute_80,code=[sm_80,compute_80]
else
GENCODE := $(foreach a,$(ARCH),-gencode arch=compute_$(a),code=sm_$(a))
endif

WARN      := -Wall -Wextra -Werror
CXXFLAGS  := -std=c++17 -O3 -march=$(MARCH) -fopenmp -I. $(WARN) -MMD -MP $(EXTRA)
NVCCFLAGS := -std=c++17 -O3 -I. -Werror all-warnings -Xcompiler -Wall,-Wextra,-fopenmp -MMD -MP $(EXTRA)
CUDA_HOME ?= $(patsubst %/bin/nvcc,%,$(shell command -v $(NVCC)))
CXXFLAGS  += -isystem $(CUDA_HOME)/include
LDLIBS    := -lcublas -lcublasLt -Xcompiler -fopenmp

KERNELS   := $(wildcard attention/*.cu layers/*.cu)
OBJECTS   := $(patsubst %.cu,build/%.o,$(KERNELS)) $(patsubst %.cpp,build/%.o,$(wildcard data/*.cpp) dev/reference.cpp)
HOSTTESTS := $(patsubst %.cpp,%,$(wildcard dev/test_*.cpp))
GPUTESTS  := $(patsubst %.cu,%,$(wildcard dev/test_*.cu))
BENCHES   := $(patsubst %.cu,%,$(wildcard dev/bench_*.cu))
ARCHS     := 75 80 86 89 90a 100 120

.PHONY: all test benches archs profile clean help
all: train_gpt2cu

train_gpt2cu: build/train_gpt2.o $(OBJECTS)
	$(NVCC) -o $@ $^ $(LDLIBS)

$(HOSTTESTS) $(GPUTESTS) $(BENCHES): %: build/%.o $(OBJECTS)
	$(NVCC) -o $@ $^ $(LDLIBS)
benches: $(BENCHES)

build/%.o: %.cu
	@mkdir -p $(@D)
	$(NVCC) $(NVCCFLAGS) $(GENCODE) -c -o $@ $<
build/%.o: %.cpp
	@mkdir -p $(@D)
	$(CXX) $(CXXFLAGS) -c -o $@ $<

clean:
	rm -rf build train_gpt2cu $(HOSTTESTS) $(GPUTESTS) $(BENCHES)
help:
	@sed -n 's/^# \{0,1\}//p' Makefile | sed '/^$$/q;/A query/q' | grep -v 'A query'

-include $(shell find build -name '*.d' 2>/dev/null)

# make train_gpt2cu   the trainer
# make test           all tests that this machine can run
# make benches        dev/bench_*, dev/accuracy, dev/study_*
# make profile        the timeline of three steps, for Nsight Systems
# make sanitize       the readers and writers of files under ASan and UBSan
# make archs          every kernel for sm_75, 80 and 90a (part of make test)
# make lint           clang-format, clang-tidy and ruff (CONTRIBUTING.md has their versions)
#
# ARCH="80 90a"   architectures to build for; default: this machine's GPUs, else 80 with PTX for later ones
# CUDA_HOME=…     the toolkit, CUDA 12 or later, or NVCC=… names its nvcc; default: on the PATH, in
#                 /usr/local/cuda* or /opt/cuda
# CXX=…           the host compiler, g++ 11 or later: the program is C++20
# MARCH=…         host instruction set, default native
# WERROR=1        warnings are errors, as in make test        -j1       one job at a time, default all cores
# TEST_PATIENCE=3 three times the time limits of make test, on a slow machine
# NCCL_HOME=…     where NCCL is, for several GPUs; default: the toolkit or the system, "none": build without
TOOLKITS := /usr/local/cuda $(shell ls -d /usr/local/cuda-* 2>/dev/null | sort -rV) /opt/cuda
FOUND  = $(if $(shell command -v nvcc),nvcc,$(firstword $(wildcard $(TOOLKITS:%=%/bin/nvcc)) nvcc))
GIVEN := $(NVCC)
override NVCC := $(or $(NVCC),$(CUDA_HOME:%=%/bin/nvcc),$(FOUND))
CXX   ?= g++
HOST  := $(lastword $(filter-out -%,$(CXX)))
CCBIN := $(if $(filter-out g++,$(HOST)),-ccbin $(HOST))
# nvcc, headers and libraries belong to one toolkit. We ask nvcc where they are, because its path
# does not tell: NVCC may be a wrapper or have options, and conda, NVIDIA and Debian use different
# folders.
DRYRUN     = $(NVCC) $(CCBIN) --dryrun -x cu -c /dev/null 2>&1
ANSWER     = $(shell $(DRYRUN) | sed -n 's/^.[$$] $(1)= *//p' | tr -d '"')
TOP       := $(or $(call ANSWER,TOP),/usr)
INCLUDES  := $(abspath $(patsubst -I%,%,$(call ANSWER,INCLUDES)))
LIBRARIES := $(abspath $(patsubst -L%,%,$(filter-out %/stubs,$(call ANSWER,LIBRARIES))))
SPACED    := $(or $(and $(word 2,$(CUDA_HOME)),$(CUDA_HOME)),$(and $(word 2,$(TOP)),$(TOP)))
ifneq ($(SPACED),)
$(error $(SPACED): make cannot use a path with a space: set CUDA_HOME to a link without one)
endif
ifneq ($(words $(CUDA_HOME)),$(words $(wildcard $(CUDA_HOME:%=%/.))))
$(error CUDA_HOME: there is no folder $(CUDA_HOME))
endif
OTHER     := $(filter-out $(realpath $(CUDA_HOME)),$(realpath $(TOP)))
ifneq ($(and $(GIVEN),$(LIBRARIES),$(CUDA_HOME),$(OTHER)),)
$(error NVCC is of $(abspath $(TOP)), and CUDA_HOME is $(CUDA_HOME): give one of them)
endif
override CUDA_HOME := $(abspath $(or $(CUDA_HOME),$(TOP)))
MARCH ?= native
ifneq ($(findstring clang,$(shell $(CXX) --version 2>/dev/null)),)
$(error $(CXX) is clang, which ignores what makes the CPU backend fast: leave out CXX, or name a g++)
endif

# All cores. A -j of the command line wins, even where Make 4.3 hides it here. Nothing may run beside clean.
# nproc would obey OpenMP's variables, which torchrun and Slurm set to 1.
ifeq ($(MAKELEVEL)$(filter -j%,$(MAKEFLAGS))$(filter clean,$(MAKECMDGOALS)),0)
MAKEFLAGS += -j$(shell env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc)
endif

gencode = $(foreach a,$(1),-gencode arch=compute_$(a),code=sm_$(a))

# A query that fails, or answers with anything but "9.0" and the like, counts as no GPU. 9.0 becomes 90a: wgmma needs the a.
PROBE := $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | grep -E '^[0-9]+\.[0-9]$$' | tr -d . | sort -u)
ARCH  ?= $(patsubst 90,90a,$(PROBE))
ifeq ($(strip $(ARCH)),)
GENCODE := -gencode arch=compute_80,code=[sm_80,compute_80]
else
GENCODE := $(call gencode,$(ARCH))
endif

# nvcc's -O is the host compiler's; kernels are always at -O3. Host code does with less (-Og compiles fastest), except the
# CPU's own layers, the choice of a token and the checksum.
CXXFLAGS  := -std=c++20 -Og -fno-math-errno -march=$(MARCH) -fopenmp -I. -Wall -Wextra -MMD -MP $(EXTRA)
NVCCFLAGS := -std=c++20 -O0 -I. $(CCBIN) -Xcompiler -Og,-Wall,-Wextra,-fopenmp -MMD -MP $(EXTRA)
# These are not among the flags whose change compiles all anew. make test keeps what make train_gpt2cu has compiled, and
# is strict with the rest. In a fresh checkout that is everything.
STRICT     = $(if $(filter 1,$(WERROR)),-Werror all-warnings)
CXXSTRICT  = $(if $(filter 1,$(WERROR)),-Werror)
CXXFLAGS  += $(patsubst %,-isystem%,$(filter-out /usr/include,$(INCLUDES)))
LDLIBS    := $(CCBIN) -lcublas -lcublasLt -Xcompiler -fopenmp $(LIBRARIES:%=-Xlinker -rpath,%)

# NCCL, for several GPUs: there if a program that includes nccl.h can be linked.
NCCL_HOME ?= $(CUDA_HOME)
NCCL_LIBS := $(foreach d,lib lib64,-L$(NCCL_HOME)/$d -Xlinker -rpath,$(NCCL_HOME)/$d) -Xlinker -l:libnccl.so.2
NCCL_TEST := printf '%s\n' '\#if __has_include(<nccl.h>)' 'int main() {}' '\#endif' | $(CXX) -x c++ - -o /dev/null \
             -idirafter $(NCCL_HOME)/include -L$(NCCL_HOME)/lib -L$(NCCL_HOME)/lib64 -l:libnccl.so.2
ifneq ($(NCCL_HOME),none)
ifeq ($(shell $(NCCL_TEST) 2>/dev/null && echo yes),yes)
NCCLFLAGS := -DHAVE_NCCL -Xcompiler -idirafter,$(NCCL_HOME)/include
LDLIBS    += $(NCCL_LIBS)
endif
endif

ifeq ($(LIBRARIES),)
MISSING := $(NVCC)
COMMA   := ,
WHY     := $(if $(shell command -v $(lastword $(filter-out -%,$(NVCC)))),$(shell $(DRYRUN) | sed -n '$$p'))
override NVCC = $(error there is no $(MISSING) with a toolkit$(if $(WHY),$(COMMA) it says "$(WHY)"): \
install the CUDA Toolkit 12 or 13, or name it with CUDA_HOME=… or NVCC=…)
endif

ROOMS     := common attention attention/ring layers cuda layers/sm90 parallel data run
SOURCES   := $(wildcard attention/*.cu layers/cpu/*.cpp $(ROOMS:%=%/*.cu) $(ROOMS:%=%/*.cpp))  # what takes long first
KERNELS   := $(filter %.cu,$(SOURCES))
OBJECTS   := $(patsubst %,build/%.o,$(basename $(SOURCES)))
# The programs of dev/. Their names are short for who types them: dev/test_data is made of dev/test/test_data.cpp.
program_of = $(addprefix dev/,$(basename $(notdir $(1))))
TESTS     := $(call program_of,$(wildcard dev/test/test_*.cpp dev/test/test_*.cu))
PYTESTS   := $(wildcard dev/test/test_*.py)
BENCHES   := $(call program_of,$(wildcard dev/bench/*.cu))
STUDIES   := $(call program_of,$(wildcard dev/study/*.cu))
TOOLS     := dev/encode dev/train_threads

.PHONY: all test sanitize archs benches profile lint clean help FORCE
all: train_gpt2cu

train_gpt2cu: build/train_gpt2.o $(OBJECTS)
	$(NVCC) -o $@ $^ $(LDLIBS)
$(TESTS) $(TOOLS): dev/%: build/dev/test/%.o $(OBJECTS)
	$(NVCC) -o $@ $^ $(LDLIBS)
$(BENCHES): dev/%: build/dev/bench/%.o $(OBJECTS)
	$(NVCC) -o $@ $^ $(LDLIBS)
$(STUDIES): dev/%: build/dev/study/%.o $(OBJECTS)
	$(NVCC) -o $@ $^ $(LDLIBS)
build/dev/test/test_gpt2.o build/dev/bench/bench_train.o build/dev/test/train_threads.o: train_gpt2.cu  # they include the program itself
benches: $(BENCHES) $(STUDIES)
# Which sources a program was built from, for --version and for a benchmark's rows.
train_gpt2cu $(BENCHES) $(STUDIES): build/tree.o
build/tree.o: build/tree.cpp
	$(CXX) -c -o $@ $<
build/tree.cpp: BUILT_FROM = $(or $(shell scripts/tree.sh 2>/dev/null),unknown dirty)
build/tree.cpp: TREE_IS = extern const char built_from[]; const char built_from[] = "$(BUILT_FROM)";
build/tree.cpp: FORCE
	@mkdir -p $(@D)
	@echo '$(TREE_IS)' | cmp -s - $@ || echo '$(TREE_IS)' >$@

build/%.o: %.cu build/nvcc.flags
	@mkdir -p $(@D)
	$(NVCC) $(NVCCFLAGS) $(STRICT) $(GENCODE) $(LANGUAGE) -c -o $@ $<
build/%.o: %.cpp build/cxx.flags
	@mkdir -p $(@D)
	$(CXX) $(CXXFLAGS) $(CXXSTRICT) -c -o $@ $<
# No kernel in these: straight to the host compiler, in half the time.
build/train_gpt2.o build/parallel/comm.o build/dev/test/test_gpt2.o: LANGUAGE := -x c++

build/data/corpus.o: data/stories.txt  # copied into the object
build/data/tokenizer.o: data/unicode_kinds.txt
build/layers/cpu/reference.o build/run/sample.o build/data/file.o: private CXXFLAGS += -O3  # private: not for its prerequisite build/cxx.flags
build/data/file.o: private CXXFLAGS += -fno-tree-slp-vectorize  # AVX2 has no product of 64 bits: the checksum would take three times as long
build/dev/test/test_attention.o build/dev/test/test_comm.o: private NVCCFLAGS += -Xcompiler -O2  # much random input

# What objects were compiled with. Where that changes, as with another ARCH, all are made anew.
build/nccl.flags: FLAGS = $(NCCLFLAGS)
build/parallel/comm.o: build/nccl.flags
build/parallel/comm.o build/archs/parallel/comm.o: private NVCCFLAGS += $(NCCLFLAGS)
build/nvcc.flags: FLAGS = $(NVCC) $(NVCCFLAGS) $(GENCODE)
build/cxx.flags: FLAGS = $(CXX) $(CXXFLAGS)
build/%.flags: FORCE
	@mkdir -p $(@D)
	@echo '$(FLAGS)' | cmp -s - $@ || echo '$(FLAGS)' >$@
FORCE:

# Builds, runs every test program, and ends in one line "N passed, N failed, N skipped".
test:
	@$(MAKE) --no-print-directory WERROR=1 train_gpt2cu $(TESTS) $(TOOLS)
	@dev/test/run_tests.sh "$(MAKE) --no-print-directory archs" $(TESTS) $(PYTESTS)

# The test itself is not optimised, because that compiles fastest.
SANITIZED := $(patsubst %,build/sanitized/%.o,dev/test/test_data $(basename $(wildcard common/*.cpp data/*.cpp)) \
             run/checkpoint_files run/choices run/log)
sanitize: $(SANITIZED)
	$(CXX) -fsanitize=address,undefined -fopenmp -o build/sanitized/test_data $^
	ASAN_OPTIONS=max_allocation_size_mb=500 build/sanitized/test_data
build/sanitized/%.o: %.cpp build/cxx.flags
	@mkdir -p $(@D)
	$(CXX) $(CXXFLAGS) $(if $(filter dev/%,$<),-O0) -fsanitize=address,undefined -fno-sanitize-recover=all -c -o $@ $<

# Every kernel for the architectures between which sources differ, warnings as errors. Later ones share the lines of these.
# In attention's a register spill is an error, too, and what ptxas says where it serializes wgmma or adds a wait (C7510 on).
archs: $(patsubst %.cu,build/archs/%.o,$(KERNELS))
build/archs/%.o: WERROR := 1
build/archs/attention/%.o: SLOW := -Xptxas -warn-spills
build/archs/%.o: %.cu
	@mkdir -p $(@D)
	$(NVCC) $(NVCCFLAGS) $(STRICT) $(SLOW) $(call gencode,75 80 90a) -c -o $@ $< 2>$@.log || { cat $@.log >&2; exit 1; }
	@if [ "$(SLOW)" ] && grep 'info *: .C75' $@.log >&2; then rm $@; exit 1; fi

# The timeline of three steps with its NVTX ranges, by Nsight Systems (dev/README.md: how to open it, and ncu).
profile: NVCCFLAGS += -lineinfo  # for the lines of the source beside Nsight Compute's counters
profile: train_gpt2cu
	nsys profile --trace=cuda,nvtx --capture-range=cudaProfilerApi --force-overwrite true --output profile \
	    ./train_gpt2cu --profile 3 -v 0 -s 0

# Format and lint. CONTRIBUTING.md has the versions; .clang-tidy says what is left out, and why.
LINTED    := $(SOURCES) train_gpt2.cu $(wildcard dev/*/*.cpp dev/*/*.cu)
FORMATTED := $(LINTED) $(wildcard dev/*/*.h dev/*/*.cuh) $(foreach r,$(ROOMS) layers/cpu,$(wildcard $r/*.h $r/*.cuh))
AS_CUDA   := -x cuda --cuda-host-only --cuda-path=$(CUDA_HOME)
TIDYFLAGS := -std=c++20 -I. -fopenmp -isystem $(shell $(CXX) -print-file-name=include) $(INCLUDES:%=-isystem%)
lint: $(LINTED:%=build/lint/%)
	clang-format --dry-run --Werror $(FORMATTED)
	ruff format --check
	ruff check
build/lint/%: % .clang-tidy $(FORMATTED)
	@mkdir -p $(@D)
	clang-tidy --quiet $< -- $(if $(filter %.cu,$<),$(AS_CUDA)) $(TIDYFLAGS) 2>/dev/null
	@touch $@

clean:
	rm -rf build train_gpt2cu $(TESTS) $(BENCHES) $(STUDIES) $(TOOLS)
help:
	@sed -n '/^#/!q;s/^# \{0,1\}//p' Makefile

-include $(shell find build -name '*.d' 2>/dev/null)

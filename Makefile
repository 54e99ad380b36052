# make train_gpt2cu   the trainer
# make test           all tests that this machine can run
# make benches        dev/bench_*, dev/accuracy and dev/study_*
# make profile        a timeline of three steps, for Nsight Systems
# make sanitize       what reads and writes files, under ASan and UBSan
# make archs          every kernel for sm_75, 80 and 90a (part of make test)
# make lint           clang-format, clang-tidy and ruff (CONTRIBUTING.md has their versions)
# make clean          removes everything that make builds
#
# ARCH="80 90a"   architectures to build for; default: this machine's GPUs, else 80, with PTX for
#                 later ones
# CUDA_HOME=…     the toolkit, CUDA 12 or later; NVCC=… names its nvcc instead. Default: the one on
#                 the PATH, in /usr/local/cuda* or in /opt/cuda
# CXX=…           the host compiler, g++ 11 or later: the program is C++20
# MARCH=…         host instruction set; default: native
# WERROR=1        warnings are errors, as in make test
# -j1             one job at a time; default: one per core
# TEST_PATIENCE=3 three times the usual time limits of make test, on a slow machine
# NCCL_HOME=…     where NCCL is, for several GPUs; default: the toolkit or the system; "none": build
#                 without NCCL

# --------------------------------------------------------------------------------------------------
# Compilers and the CUDA Toolkit

CXX   ?= g++
MARCH ?= native

# CXX may be "ccache g++ -g".
HOST_COMPILER := $(lastword $(filter-out -%,$(CXX)))
CCBIN         := $(if $(filter-out g++,$(HOST_COMPILER)),-ccbin $(HOST_COMPILER))

ifneq ($(findstring clang,$(shell $(CXX) --version 2>/dev/null)),)
$(error $(CXX) is clang, which ignores what makes the CPU backend fast: leave out CXX or name a g++)
endif

# The first of: NVCC, CUDA_HOME's nvcc, the one on the PATH, those in the usual places.
TOOLKITS   := /usr/local/cuda $(shell ls -d /usr/local/cuda-* 2>/dev/null | sort -rV) /opt/cuda
ON_PATH     = $(if $(shell command -v nvcc),nvcc)
INSTALLED   = $(firstword $(wildcard $(TOOLKITS:%=%/bin/nvcc)) nvcc)
GIVEN_NVCC := $(NVCC)
override NVCC := $(or $(NVCC),$(CUDA_HOME:%=%/bin/nvcc),$(ON_PATH),$(INSTALLED))

# nvcc, headers and libraries have to belong to the same toolkit. We ask nvcc where it is, because
# its path does not tell: NVCC may be a wrapper or have options, and conda, NVIDIA and Debian use
# different folders. It answers in lines such as: #$ TOP=/usr/local/cuda/bin/..  Debian's, which is
# in /usr, names no TOP. (In the pattern a dot stands for the #, which would begin a comment.)
DRYRUN     = $(NVCC) $(CCBIN) --dryrun -x cu -c /dev/null 2>&1
answer     = $(shell $(DRYRUN) | sed -n 's/^.[$$] $(1)= *//p' | tr -d '"')
TOP       := $(or $(call answer,TOP),/usr)
INCLUDES  := $(abspath $(patsubst -I%,%,$(call answer,INCLUDES)))
LIBRARIES := $(abspath $(patsubst -L%,%,$(filter-out %/stubs,$(call answer,LIBRARIES))))

# A path with a space is several words to make.
if_spaced = $(if $(word 2,$(1)),$(1))
SPACED   := $(or $(call if_spaced,$(CUDA_HOME)),$(call if_spaced,$(TOP)))
ifneq ($(SPACED),)
$(error $(SPACED): make cannot use a path with a space: set CUDA_HOME to a link without one)
endif
ifneq ($(CUDA_HOME),)
ifeq ($(wildcard $(CUDA_HOME)/.),)
$(error CUDA_HOME: there is no folder $(CUDA_HOME))
endif
endif
OTHER_TOP := $(filter-out $(realpath $(CUDA_HOME)),$(realpath $(TOP)))
ifneq ($(and $(GIVEN_NVCC),$(LIBRARIES),$(CUDA_HOME),$(OTHER_TOP)),)
$(error NVCC belongs to $(abspath $(TOP)), but CUDA_HOME is $(CUDA_HOME): give only one of them)
endif
override CUDA_HOME := $(abspath $(or $(CUDA_HOME),$(TOP)))

# Without a toolkit, make help and make clean still work, but any use of NVCC is this error.
ifeq ($(LIBRARIES),)
MISSING := $(NVCC)
EXISTS  := $(shell command -v $(lastword $(filter-out -%,$(NVCC))))
COMMA   := ,
SAYS    := $(if $(EXISTS),$(COMMA) it says "$(shell $(DRYRUN) | sed -n '$$p')")
override NVCC = $(error there is no $(MISSING) with a toolkit$(SAYS): \
install the CUDA Toolkit 12 or 13, or name it with CUDA_HOME=… or NVCC=…)
endif

# By default one job per core. A make that another make has started shares its jobs. A -j on the
# command line wins, also in Make 4.3, whose MAKEFLAGS lack it here. clean must not run in parallel
# with anything else. nproc would obey OpenMP's variables, which torchrun and Slurm set to 1.
KEEP_JOBS := $(filter-out 0,$(MAKELEVEL))$(filter -j%,$(MAKEFLAGS))$(filter clean,$(MAKECMDGOALS))
ifeq ($(KEEP_JOBS),)
MAKEFLAGS += -j$(shell env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc)
endif

# --------------------------------------------------------------------------------------------------
# Architectures and flags

gencode = $(foreach a,$(1),-gencode arch=compute_$(a),code=sm_$(a))

# If the query fails or prints anything but "9.0" and the like, there is no GPU. 9.0 becomes 90a,
# because only that has wgmma.
QUERY := nvidia-smi --query-gpu=compute_cap --format=csv,noheader
PROBE := $(shell $(QUERY) 2>/dev/null | grep -E '^[0-9]+\.[0-9]$$' | tr -d . | sort -u)
ARCH  ?= $(patsubst 90,90a,$(PROBE))
ifeq ($(strip $(ARCH)),)
GENCODE := -gencode arch=compute_80,code=[sm_80,compute_80]
else
GENCODE := $(call gencode,$(ARCH))
endif

# nvcc's -O is for host code; kernels are always compiled at -O3. Host code does not need it (-Og
# compiles fastest), except the files that are listed below.
CXXFLAGS  := -std=c++20 -Og -fno-math-errno -march=$(MARCH) -fopenmp -I. -Wall -Wextra \
             -MMD -MP $(EXTRA)
NVCCFLAGS := -std=c++20 -O0 -I. $(CCBIN) -Xcompiler -Og,-Wall,-Wextra,-fopenmp -MMD -MP $(EXTRA)
CXXFLAGS  += $(patsubst %,-isystem%,$(filter-out /usr/include,$(INCLUDES)))
LDLIBS    := $(CCBIN) -lcublas -lcublasLt -Xcompiler -fopenmp $(LIBRARIES:%=-Xlinker -rpath,%)

# These are not in build/*.flags, so WERROR=1 recompiles nothing. make test takes the objects that
# make train_gpt2cu has compiled as they are, and is strict only with what it compiles itself: in a
# fresh checkout, with everything.
STRICT    = $(if $(filter 1,$(WERROR)),-Werror all-warnings)
CXXSTRICT = $(if $(filter 1,$(WERROR)),-Werror)

# NCCL, for several GPUs, is used if both its header and its library are here: the test has a main()
# only with the header, and it is linked with the library.
NCCL_HOME ?= $(CUDA_HOME)
NCCL_DIRS := $(foreach d,lib lib64,-L$(NCCL_HOME)/$d -Xlinker -rpath,$(NCCL_HOME)/$d)
NCCL_TEST := printf '%s\n' '\#if __has_include(<nccl.h>)' 'int main() {}' '\#endif' | \
             $(CXX) -x c++ - -o /dev/null -idirafter $(NCCL_HOME)/include \
             -L$(NCCL_HOME)/lib -L$(NCCL_HOME)/lib64 -l:libnccl.so.2
ifneq ($(NCCL_HOME),none)
ifeq ($(shell $(NCCL_TEST) 2>/dev/null && echo yes),yes)
NCCLFLAGS := -DHAVE_NCCL -Xcompiler -idirafter,$(NCCL_HOME)/include
LDLIBS    += $(NCCL_DIRS) -Xlinker -l:libnccl.so.2
endif
endif

# --------------------------------------------------------------------------------------------------
# Sources and programs

ROOMS   := common attention attention/ring layers layers/cpu cuda layers/sm90 parallel data run
# What takes longest to compile comes first. These files are in ROOMS, too; among prerequisites
# make drops the second mention.
SOURCES := $(wildcard attention/*.cu layers/cpu/*.cpp $(ROOMS:%=%/*.cu) $(ROOMS:%=%/*.cpp))
KERNELS := $(filter %.cu,$(SOURCES))
OBJECTS := $(patsubst %,build/%.o,$(basename $(SOURCES)))

# The programs of dev/ have short names: dev/test_data is built from dev/test/test_data.cpp.
program_of = $(addprefix dev/,$(basename $(notdir $(1))))
TESTS     := $(call program_of,$(wildcard dev/test/test_*.cpp dev/test/test_*.cu))
PYTESTS   := $(wildcard dev/test/test_*.py)
BENCHES   := $(call program_of,$(wildcard dev/bench/*.cu))
STUDIES   := $(call program_of,$(wildcard dev/study/*.cu))
TOOLS     := dev/encode dev/train_threads

.PHONY: all test sanitize archs benches profile lint clean help FORCE
all: train_gpt2cu
benches: $(BENCHES) $(STUDIES)

train_gpt2cu: build/train_gpt2.o $(OBJECTS)
	$(NVCC) -o $@ $^ $(LDLIBS)
$(TESTS) $(TOOLS): dev/%: build/dev/test/%.o $(OBJECTS)
	$(NVCC) -o $@ $^ $(LDLIBS)
# These tests start the program, or threads that train with it.
dev/test_data dev/test_program dev/test_recipe dev/test_resume: \
    | train_gpt2cu dev/train_threads
$(BENCHES): dev/%: build/dev/bench/%.o $(OBJECTS)
	$(NVCC) -o $@ $^ $(LDLIBS)
$(STUDIES): dev/%: build/dev/study/%.o $(OBJECTS)
	$(NVCC) -o $@ $^ $(LDLIBS)

build/%.o: %.cu build/nvcc.flags
	@mkdir -p $(@D)
	$(NVCC) $(NVCCFLAGS) $(STRICT) $(GENCODE) $(LANGUAGE) -c -o $@ $<
build/%.o: %.cpp build/cxx.flags
	@mkdir -p $(@D)
	$(CXX) $(CXXFLAGS) $(CXXSTRICT) -c -o $@ $<

# These include the program itself.
build/dev/test/test_gpt2.o: train_gpt2.cu
build/dev/test/train_threads.o: train_gpt2.cu
build/dev/bench/bench_train.o: train_gpt2.cu

# EMBED copies these texts into the objects.
build/data/corpus.o: data/stories.txt
build/data/tokenizer.o: data/unicode_kinds.txt

# Flags of single files. "private" keeps them from a file's prerequisites, such as build/cxx.flags.
# There is no kernel in these, so the host compiler alone compiles them, in half the time.
build/train_gpt2.o build/parallel/comm.o build/dev/test/test_gpt2.o: LANGUAGE := -x c++
# The CPU's own layers, the choice of a token, and the checksum.
build/layers/cpu/reference.o build/run/sample.o build/data/file.o: private CXXFLAGS += -O3
# AVX2 has no 64-bit product, with which the checksum would take three times as long.
build/data/file.o: private CXXFLAGS += -fno-tree-slp-vectorize
# They generate much random input.
build/dev/test/test_attention.o build/dev/test/test_comm.o: private NVCCFLAGS += -Xcompiler -O2
build/parallel/comm.o build/archs/parallel/comm.o: private NVCCFLAGS += $(NCCLFLAGS)

# The flags that objects were compiled with. If these change, as with another ARCH, all objects are
# recompiled.
build/nvcc.flags: FLAGS = $(NVCC) $(NVCCFLAGS) $(GENCODE)
build/archs.flags: FLAGS = $(NVCC) $(NVCCFLAGS) $(EVERY_ARCH)
build/cxx.flags: FLAGS = $(CXX) $(CXXFLAGS)
build/nccl.flags: FLAGS = $(NCCLFLAGS)
build/parallel/comm.o build/archs/parallel/comm.o: build/nccl.flags
build/%.flags: FORCE
	@mkdir -p $(@D)
	@echo '$(FLAGS)' | cmp -s - $@ || echo '$(FLAGS)' >$@
FORCE:

# Which sources a program was built from, for --version and for a benchmark's rows.
train_gpt2cu $(BENCHES) $(STUDIES): build/tree.o
build/tree.o: build/tree.cpp
	$(CXX) -c -o $@ $<
build/tree.cpp: BUILT_FROM = $(or $(shell scripts/tree.sh 2>/dev/null),unknown dirty)
build/tree.cpp: TREE_IS = extern const char built_from[]; const char built_from[] = "$(BUILT_FROM)";
build/tree.cpp: FORCE
	@mkdir -p $(@D)
	@echo '$(TREE_IS)' | cmp -s - $@ || echo '$(TREE_IS)' >$@

# --------------------------------------------------------------------------------------------------
# Tests, profile and lint

# Builds and runs every test program. The last line is "N passed, N failed, N skipped".
test:
	@$(MAKE) --no-print-directory WERROR=1 train_gpt2cu $(TESTS) $(TOOLS)
	@dev/test/run_tests.sh "$(MAKE) --no-print-directory archs" $(TESTS) $(PYTESTS)

SANITIZE  := -fsanitize=address,undefined
SANITIZED := dev/test/test_data $(basename $(wildcard common/*.cpp data/*.cpp)) \
             run/checkpoint_files run/choices run/log
sanitize: $(SANITIZED:%=build/sanitized/%.o) | train_gpt2cu  # which test_data starts
	$(CXX) $(SANITIZE) -fopenmp -o build/sanitized/test_data $^
	ASAN_OPTIONS=max_allocation_size_mb=500 build/sanitized/test_data
# The test itself is not optimised, because that compiles fastest.
build/sanitized/dev/%.o: LEVEL := -O0
build/sanitized/%.o: %.cpp build/cxx.flags
	@mkdir -p $(@D)
	$(CXX) $(CXXFLAGS) $(LEVEL) $(SANITIZE) -fno-sanitize-recover=all -c -o $@ $<

# Every kernel, with warnings as errors, for one architecture of each kind: by #if, sm_75, 80 and
# 90a compile different lines, and later architectures compile the lines of one of these. In
# attention/ a register spill is an error, too, and so is what ptxas says where it serializes wgmma
# or adds a wait (C7510 and up): SPILLS is set for the files of attention/.
EVERY_ARCH := $(call gencode,75 80 90a)
archs: $(patsubst %.cu,build/archs/%.o,$(KERNELS))
build/archs/%.o: WERROR := 1
build/archs/attention/%.o: SPILLS := -Xptxas -warn-spills
build/archs/%.o: %.cu build/archs.flags
	@mkdir -p $(@D)
	$(NVCC) $(NVCCFLAGS) $(STRICT) $(SPILLS) $(EVERY_ARCH) -c -o $@ $< 2>$@.log || \
	    { cat $@.log >&2; exit 1; }
	@if [ "$(SPILLS)" ] && grep 'info *: .C75' $@.log >&2; then rm $@; exit 1; fi

# A timeline of three steps with its NVTX ranges. dev/README.md says how to open it, and how to use
# ncu; -lineinfo shows the lines of the source next to Nsight Compute's counters.
profile: NVCCFLAGS += -lineinfo
profile: train_gpt2cu
	nsys profile --trace=cuda,nvtx --capture-range=cudaProfilerApi --force-overwrite true \
	    --output profile ./train_gpt2cu --profile 3 -v 0 -s 0

# .clang-tidy says which checks are left out, and why.
LINTED    := $(sort $(SOURCES) train_gpt2.cu $(wildcard dev/*/*.cpp dev/*/*.cu))
HEADERS   := $(foreach d,$(ROOMS) dev/*,$(wildcard $d/*.h $d/*.cuh))
AS_CUDA   := -x cuda --cuda-host-only --cuda-path=$(CUDA_HOME)
TIDYFLAGS := -std=c++20 -I. -fopenmp -isystem $(shell $(CXX) -print-file-name=include) \
             $(INCLUDES:%=-isystem%)
lint: $(LINTED:%=build/lint/%)
	clang-format --dry-run --Werror $(LINTED) $(HEADERS)
	ruff format --check
	ruff check
build/lint/%: % .clang-tidy $(LINTED) $(HEADERS)
	@mkdir -p $(@D)
	clang-tidy --quiet $< -- $(if $(filter %.cu,$<),$(AS_CUDA)) $(TIDYFLAGS) 2>/dev/null
	@touch $@

clean:
	rm -rf build train_gpt2cu $(TESTS) $(BENCHES) $(STUDIES) $(TOOLS)
help:
	@sed -n '/^#/!q;s/^# \{0,1\}//p' Makefile

-include $(shell find build -name '*.d' 2>/dev/null)

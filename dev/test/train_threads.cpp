// See dev/test/train_threads.h.
#define TRAIN_GPT2_NO_MAIN
#pragma GCC diagnostic ignored "-Wunused-function"  // parts of the program stay unused here
// First, because train_threads.h uses the program and does not include it.
#include "train_gpt2.cu"

#include "dev/test/train_threads.h"

int main(int argc, char** argv) {
    std::setvbuf(stdout, nullptr, _IOLBF, 0);
    return train_on_threads(argc, argv);
}

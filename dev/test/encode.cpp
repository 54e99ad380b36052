// Prints a text's token ids, one a line. dev/test/test_prepare.py compares them with tiktoken's.
//
//   ./dev/encode gpt2_tokenizer.bin book.txt
#include "data/file.h"
#include "data/tokenizer.h"

int main(int argc, char** argv) {
    return run_program("encode", [&] {
        if (argc != 3)
            throw UsageError("give a tokenizer file and a text file");

        const std::string text = InputFile(argv[2]).read_all();
        for (const int id : Tokenizer(argv[1]).encode(text, kGpt2Vocab, argv[2]))
            std::printf("%d\n", id);
        return 0;
    });
}

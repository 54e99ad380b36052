// Multiple-choice evaluations such as HellaSwag, in llm.c's format. The header is 256 int32: magic
// 20240522, version 1, number of examples, bytes of the longest. Then each example is a stream of
// uint16. It starts with 65535, its bytes, its index, the label and the number of endings. The
// context and each ending follow as a count and that many tokens.
#pragma once
#include <string>
#include <vector>

struct Choice {
    int index = 0, label = 0;
    std::vector<int> context;
    std::vector<std::vector<int>> endings;
};

// Throws Error with file, offset, expected and found if something is wrong, or does not fit the
// model.
std::vector<Choice> read_choices(const std::string& path, int vocab, int max_T);

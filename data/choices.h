// Multiple-choice evaluations such as HellaSwag, in llm.c's format: 256×int32 header (magic 20240522, version 1, number
// of examples, bytes of the longest), then for each example a stream of uint16: 65535, its bytes, its index, the label,
// the number of endings, and the context and each ending as a count and so many tokens.
#pragma once
#include <string>
#include <vector>

struct Choice {
    int index = 0, label = 0;
    std::vector<int> context;
    std::vector<std::vector<int>> endings;
};

// Throws Error: magic, version, truncation, a label or count that cannot be, a token >= vocab, an example of more than
// max_T tokens; with file, offset, expected and found.
std::vector<Choice> read_choices(const std::string& path, int vocab, int max_T);
void write_choices(const std::string& path, const std::vector<Choice>& choices);

// Multiple-choice evaluations such as HellaSwag, in llm.c's format. The header is 256 int32: magic
// 20240522, version 1, number of examples, bytes of the longest. Each example is a stream of
// uint16: 65535, its bytes, its index, the label, the number of endings, and then the context and
// each ending, each as a count and that many tokens.
#pragma once
#include <string>
#include <vector>

// An example: a context and several endings, one of which is right.
struct Question {
    int index = 0;
    int label = 0;  // the index of the right ending
    std::vector<int> context;
    std::vector<std::vector<int>> endings;
};

// Throws an Error with file, offset, expected and found if the file is damaged or does not fit the
// model.
std::vector<Question> read_questions(const std::string& path, int vocab, int max_T);

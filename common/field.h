// A setting or a property as text.
#pragma once
#include <string>
#include <vector>

struct Field {
    std::string name;
    std::string value;
    bool operator==(const Field& other) const { return name == other.name && value == other.value; }
};
using Fields = std::vector<Field>;

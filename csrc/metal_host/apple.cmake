# The Metal back end on macOS: metal-cpp, the text of the kernels, the frameworks.
set(DS4_METAL_CPP "" CACHE PATH "Folder with Metal/Metal.hpp; empty: Apple's archive is fetched")
if(DS4_METAL_CPP)
  set(metal_cpp ${DS4_METAL_CPP})
else()
  include(FetchContent)
  FetchContent_Declare(metal_cpp URL https://developer.apple.com/metal/cpp/files/metal-cpp_macOS15_iOS18.zip)
  FetchContent_MakeAvailable(metal_cpp)  # headers only: nothing is configured
  set(metal_cpp ${metal_cpp_SOURCE_DIR})
endif()
file(GLOB ds4_metal_files CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/metal/*.metal)
file(GLOB ds4_metal_headers CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/metal/*.h)
set(generated ${CMAKE_BINARY_DIR}/metal)
add_custom_command(
  OUTPUT ${generated}/sources.cpp
  COMMAND ${Python_EXECUTABLE} ${CMAKE_SOURCE_DIR}/metal/generate.py --embed ${generated} ${ds4_metal_files}
  DEPENDS ${ds4_metal_files} ${ds4_metal_headers} ${CMAKE_SOURCE_DIR}/metal/generate.py
  COMMENT "Embedding the Metal kernels" VERBATIM)
target_sources(ds4_core PRIVATE ${generated}/sources.cpp)
target_include_directories(ds4_core SYSTEM PRIVATE ${metal_cpp})
target_link_libraries(ds4_core PUBLIC "-framework Foundation" "-framework Metal" "-framework QuartzCore")
